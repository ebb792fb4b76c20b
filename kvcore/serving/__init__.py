"""The calls that an engine makes for its requests, as plain functions over a prefix cache, its
allocator and its request table. docs/serving.md follows one request through them.

Every function answers None (or False) where there is no room, even after eviction, and then nothing
changed; nothing changes either where it raises, but for what was evicted from the cache by then.
"""

from kvcore.serving.admission import admit, prefill
from kvcore.serving.decoding import decode, slide_windows
from kvcore.serving.ending import abort, finish
from kvcore.serving.loading import (
    HostPrefix,
    PrefixLoad,
    begin_load,
    cancel_load,
    finish_load,
    save_prefix,
)
from kvcore.serving.request import ServingRequest
from kvcore.serving.retraction import resume, retract
from kvcore.serving.room import make_room
from kvcore.serving.speculation import speculate, trim

__all__ = [
    "HostPrefix",
    "PrefixLoad",
    "ServingRequest",
    "abort",
    "admit",
    "begin_load",
    "cancel_load",
    "decode",
    "finish",
    "finish_load",
    "make_room",
    "prefill",
    "resume",
    "retract",
    "save_prefix",
    "slide_windows",
    "speculate",
    "trim",
]
