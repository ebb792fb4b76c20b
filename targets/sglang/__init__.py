"""Released SGLang allocators as targets: loading them, and driving them with the harness's ops.

Leaves out the serving stack: no scheduler, no prefix cache and no real pool of a release is run.
"""
