"""The compiled parts of the package, which pyproject.toml cannot describe.

They are optional: where there is no C compiler the package is installed without them.
"""

from setuptools import Extension, setup

VECTOR = "kvcore/_vector.h"

setup(
    ext_modules=[
        Extension("kvcore._native", ["kvcore/_native.c"], depends=[VECTOR], optional=True),
        Extension("kvcore.targets._tape", ["targets/_tape.c"], depends=[VECTOR], optional=True),
    ]
)
