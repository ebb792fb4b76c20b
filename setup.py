"""The compiled part of the package, which pyproject.toml cannot describe yet.

It is optional: where there is no C compiler the package is installed without it.
"""

from setuptools import Extension, setup

setup(ext_modules=[Extension("kvcore._native", ["kvcore/_native.c"], optional=True)])
