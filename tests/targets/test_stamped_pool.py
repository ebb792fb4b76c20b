"""The pool under a target: every token's stamp is where its kernels would read it, in every stream
of every kind of layer, and moves with the token.
"""

from typing import Any

import numpy as np
import pytest
import torch

from kvcore.models import Done, Geometry, Lent, ops
from kvcore.models.ops import Op
from kvcore.targets.core import core_target
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.pool import INDEX_HEAD_DIM, StampedPool, build_pool
from kvcore.targets.protocol import MHA_STREAMS

torch.set_num_threads(1)

PURE = Geometry(4, 8, pure_swa=True)
SPARSE = Geometry(4, 8, device_pages=4)
COMPRESSED = Geometry(16, 8, 6, device_pages=6, compress=4)


def lent(target: AllocatorTarget, op: Op) -> Lent:
    outcome = target.apply(op)
    assert isinstance(outcome, Lent), outcome
    return outcome


LATENT = ("latent", "rope")
DSA = (*LATENT, "index-K", "index-K scale")


@pytest.mark.parametrize(
    ("geometry", "names"),
    [
        (Geometry(4, 8), ["full K", "full V"]),
        (Geometry(4, 8, 6), ["full K", "full V", "SWA K", "SWA V"]),
        (PURE, ["full K", "full V"]),
        (Geometry(4, 8, attention="mla"), [f"full {part}" for part in LATENT]),
        (Geometry(4, 8, pure_swa=True, attention="dsa"), [f"full {part}" for part in DSA]),
        (
            Geometry(4, 8, 6, attention="mla"),
            [f"{side} {part}" for side in ("full", "SWA") for part in LATENT],
        ),
        (
            Geometry(4, 8, 6, attention="dsa"),
            [f"{side} {part}" for side in ("full", "SWA") for part in DSA],
        ),
        (SPARSE, [f"device {part}" for part in LATENT]),
        (COMPRESSED, ["full K", "full V", "SWA K", "SWA V", "device latent", "device rope"]),
    ],
    ids=lambda value: value.describe() if isinstance(value, Geometry) else "",
)
def test_every_kind_of_layer_has_its_streams_and_each_holds_the_stamps(
    geometry: Geometry, names: list[str]
) -> None:
    target = core_target(geometry)
    found: dict[str, list[int]] = {"full": [], "SWA": [], "device": []}
    size = geometry.page_size
    for op in (ops.Alloc(1, 1), ops.Extend(((2, size + 1),)), ops.Decode((2,))):
        answer = lent(target, op)
        found["full"] += answer.slots
        found["SWA"] += answer.peers
        found["device"] += answer.device
    view = target.view(stamps=True)

    assert [stream.name for stream in view.streams] == names
    for stream, rows in zip(view.streams, view.host().stamps, strict=True):
        stamps = {slot: stamp for stamp, slot in enumerate(found[stream.side], 1) if slot}
        assert stamps
        assert {slot: rows[slot] for slot in stamps} == {
            slot: stream.sign * stamp for slot, stamp in stamps.items()
        }, stream
        # The rest is as it was when the pool was built.
        assert not any(value for slot, value in enumerate(rows) if slot and slot not in stamps)


def test_the_streams_of_keys_and_values_are_known_to_whoever_has_no_pool_to_ask() -> None:
    assert core_target(Geometry(4, 8, 6)).view(stamps=True).streams == MHA_STREAMS


def test_a_stamp_of_index_k_is_in_the_bytes_of_its_token_alone() -> None:
    pool: Any = build_pool(Geometry(4, 8, attention="dsa"))
    stamped = StampedPool(pool)
    stamped.stamp(np.array([6]), np.array([0x01020304]))
    (page,) = pool.index_k_with_scale_buffer[0][1:2].tolist()
    key, scale = 2 * INDEX_HEAD_DIM, 4 * INDEX_HEAD_DIM + 2 * 4
    named = {*range(key, key + 4), *range(scale, scale + 4)}
    assert {place for place, byte in enumerate(page) if byte} <= named
    assert page[key : key + 4] == [4, 3, 2, 1]
    assert int.from_bytes(page[scale : scale + 4], "little", signed=True) == -0x01020304


@pytest.mark.parametrize("attention", ["mha", "mla", "dsa"])
@pytest.mark.parametrize("swa", [0, 6])
def test_a_retracted_row_comes_back_with_its_stamps_in_every_stream(
    attention: Any, swa: int
) -> None:
    target = core_target(Geometry(4, 8, swa, attention=attention))
    lent(target, ops.Extend(((1, 6),)))
    assert target.apply(ops.Retract(1, 1)) == Done()
    lent(target, ops.Alloc(2, 3))
    answer = lent(target, ops.Restore(1, 3))
    view = target.view(stamps=True)
    for stream, rows in zip(view.streams, view.host().stamps, strict=True):
        places = answer.peers if stream.side == "SWA" else answer.slots
        assert [stream.sign * rows[place] for place in places] == [1, 2, 3, 4, 5, 6], stream


@pytest.mark.parametrize("attention", ["mha", "mla", "dsa"])
@pytest.mark.parametrize("swa", [0, 6])
def test_a_relocated_row_takes_its_stamps_along_in_every_stream(attention: Any, swa: int) -> None:
    target = core_target(Geometry(4, 8, swa, attention=attention))
    before = lent(target, ops.Extend(((1, 6),)))
    answer = lent(target, ops.Relocate(1))
    assert set(answer.slots).isdisjoint(before.slots)
    view = target.view(stamps=True)
    for stream, rows in zip(view.streams, view.host().stamps, strict=True):
        places = answer.peers if stream.side == "SWA" else answer.slots
        assert [stream.sign * rows[place] for place in places] == [1, 2, 3, 4, 5, 6], stream
