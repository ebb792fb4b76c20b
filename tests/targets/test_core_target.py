"""kvcore's own target: what each op does to a real allocator, what the view shows and keeps, how
errors become answers.

Leaves out the hostile calls (test_core_hostility.py), other kinds of pools (test_core_machines.py,
test_core_requests.py, test_saver_probe.py), and whether the answers are right: that is
judged by model and laws, on random programs.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from kvcore import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvcore.invariants import Run, Skipped
from kvcore.models import Done, Geometry, Lent, Raised, Refused, ops
from kvcore.models.hostile import HOSTILE_CALLS
from kvcore.models.ops import Op
from kvcore.targets.attempt import attempt
from kvcore.targets.core import CoreParts, core_contract, core_target
from kvcore.targets.core_dialects import SingleDialect
from kvcore.targets.driver import AllocatorTarget
from kvcore.targets.held import HELD_ANSWERS
from kvcore.targets.pool import StampedPool, build_pool

torch.set_num_threads(1)

HYBRID = Geometry(4, 8, 6)
SINGLE = Geometry(4, 8)
SLOTS = Geometry(1, 8)
PAIR = (ops.Alloc(1, 2), ops.Alloc(2, 1))


def target_after(*program: Op, geometry: Geometry = HYBRID, **options: Any) -> AllocatorTarget:
    """A core target on which a program ran."""
    target = core_target(geometry, **options)
    for op in program:
        outcome = target.apply(op)
        assert not isinstance(outcome, Raised), outcome
    return target


def lent(target: AllocatorTarget, op: Op) -> Lent:
    outcome = target.apply(op)
    assert isinstance(outcome, Lent)
    return outcome


def state(target: AllocatorTarget) -> tuple[Any, ...]:
    """All that the view shows but the held tensors; free pages in any order."""
    host = target.view(stamps=True).host()
    free = sorted(host.full_free), sorted(host.swa_free)
    return (*free, host.mapping, host.stamps, host.answers)


# Answers.


@pytest.mark.parametrize("geometry", [HYBRID, SINGLE, SLOTS], ids=Geometry.describe)
def test_every_kind_of_allocation_answers_as_many_slots_as_tokens(geometry: Geometry) -> None:
    target = target_after(geometry=geometry)
    size = geometry.page_size
    for op, tokens in [
        (ops.Alloc(1, 2), 2 * size),
        (ops.Extend(((2, 3), (3, 1))), 4),
        (ops.Decode((2, 3)), 2),
    ]:
        answer = lent(target, op)
        assert len(answer.slots) == tokens
        assert len(answer.peers) == (tokens if geometry.hybrid else 0)


def test_slots_are_in_row_order_and_peers_beside_them() -> None:
    target = target_after(ops.Extend(((1, 2),)))
    answer = lent(target, ops.Extend(((1, 4),)))
    offsets = [slot % 4 for slot in answer.slots]
    assert offsets == [peer % 4 for peer in answer.peers] == [2, 3, 0, 1]
    mapping = target.view(stamps=False).host().mapping
    assert [mapping[slot] for slot in answer.slots] == list(answer.peers)


def test_tokens_before_the_tail_have_no_peer() -> None:
    answer = lent(target_after(), ops.SwaTail(1, 10, 2))
    assert [peer != 0 for peer in answer.peers] == [False] * 8 + [True] * 2


def test_tokens_beyond_the_tail_have_no_peer() -> None:
    answer = lent(target_after(ops.Alloc(1, 1)), ops.SwaTail(1, 11, 5, 2))
    assert [peer != 0 for peer in answer.peers] == [False] * 4 + [True] * 5 + [False] * 2


def test_a_load_back_has_peers_for_its_last_pages() -> None:
    answer = lent(target_after(), ops.LoadBack(1, 3, 1))
    assert [peer != 0 for peer in answer.peers] == [False] * 8 + [True] * 4


def test_a_full_only_load_back_takes_no_swa_page() -> None:
    target = target_after()
    answer = lent(target, ops.LoadBack(1, 8, 0))
    assert not any(answer.peers)
    assert target.view(stamps=False).answers.swa_available == HYBRID.swa_size


def test_an_swa_load_back_answers_the_slots_that_were_there() -> None:
    target = target_after()
    slots = lent(target, ops.Alloc(1, 2)).slots
    target.apply(ops.FreeSwa(1))
    answer = lent(target, ops.LoadBackSwa(1, 1, 2))
    assert answer.slots == slots[4:]
    assert all(answer.peers)


@pytest.mark.parametrize(
    "op",
    [
        ops.Alloc(9, 9),
        ops.Extend(((9, 99),)),
        ops.Decode((1, 2)),
        ops.SwaTail(9, 28, 28),
        ops.LoadBack(9, 9, 0),
        ops.LoadBack(9, 7, 7),
        ops.LoadBackSwa(3),
        ops.Restore(1, 9),
    ],
    ids=str,
)
def test_too_little_room_is_a_refusal_that_changes_nothing(op: Op) -> None:
    # Rows 1 and 2 end with full pages; row 3 is a tombstone; backup 1 holds two pages; all six SWA
    # pages are taken, and seven of eight full ones.
    target = target_after(ops.Alloc(4, 2), ops.Retract(4, 1), ops.Alloc(3, 1), ops.FreeSwa(3))
    for filling in (ops.Alloc(1, 3), ops.Alloc(2, 3)):
        lent(target, filling)
    before = state(target)
    assert target.apply(op) == Refused()
    assert state(target) == before


def test_a_refused_restore_can_be_asked_again() -> None:
    target = target_after(*PAIR, ops.Retract(1, 1), ops.Alloc(3, 5))
    assert target.apply(ops.Restore(1, 4)) == Refused()
    target.apply(ops.Free(3))
    assert len(lent(target, ops.Restore(1, 4)).slots) == 8


@pytest.mark.parametrize(
    "op",
    [
        ops.GroupBegin(),
        ops.Free(1, form="sparse"),
        ops.Free(1, 1, 2, form="segment"),
        ops.Free(1, form="segments"),
        ops.FreeSwa(1, form="segment"),
        ops.FreeSwa(1, form="sparse"),
        ops.FreeSwa(1, form="segments"),
        ops.FreeFull(3, form="slots"),
        ops.FreeFull(3, form="segment"),
        ops.FreeFull(3, form="segments"),
        ops.Recover(3, 1, locked=True, pages=2),
        ops.Recover(3, 1, locked=False),
        ops.Retract(1, 1),
        ops.Clear(),
    ],
    ids=str,
)
def test_an_op_that_lends_nothing_answers_done_and_keeps_every_law(op: Op) -> None:
    run = Run(core_target(HYBRID))
    for step in (*PAIR, ops.Alloc(3, 2), ops.FreeSwa(3)):
        assert not isinstance(run.step(step), Skipped)
    assert run.step(op) == Done()
    run.finish()


@pytest.mark.parametrize("form", ["slots", "sparse", "segment", "segments"])
@pytest.mark.parametrize("geometry", [HYBRID, SINGLE, SLOTS], ids=Geometry.describe)
def test_every_form_of_free_gives_the_pages_back(geometry: Geometry, form: Any) -> None:
    target = target_after(geometry=geometry)
    before = state(target)[:2]
    target.apply(ops.Alloc(1, 5))
    assert target.apply(ops.Free(1, 2, 5, form=form)) == Done()
    assert target.apply(ops.Free(1, form=form)) == Done()
    assert state(target)[:2] == before


@pytest.mark.parametrize("form", ["slots", "segment", "segments"])
def test_one_pool_frees_its_pages_with_free_full_too(form: Any) -> None:
    target = target_after(ops.Alloc(1, 3), geometry=SINGLE)
    assert target.apply(ops.FreeFull(1, form=form)) == Done()
    assert target.view(stamps=False).answers.available == SINGLE.full_size


# Stamps.


def test_the_nth_token_has_stamp_n_in_k_and_its_negative_in_v() -> None:
    target = target_after()
    slots: list[int] = []
    peers: list[int] = []
    for op in (ops.Alloc(1, 1), ops.Extend(((2, 3), (3, 2))), ops.Decode((2,))):
        answer = lent(target, op)
        slots += answer.slots
        peers += answer.peers
    full_k, full_v, swa_k, swa_v = target.view(stamps=True).host().stamps
    stamps = list(range(1, len(slots) + 1))
    assert [full_k[slot] for slot in slots] == [swa_k[peer] for peer in peers] == stamps
    assert [-full_v[slot] for slot in slots] == [-swa_v[peer] for peer in peers] == stamps


def test_an_swa_load_back_stamps_its_peers_alone() -> None:
    target = target_after()
    slots = lent(target, ops.Alloc(1, 1)).slots
    target.apply(ops.FreeSwa(1))
    peers = lent(target, ops.LoadBackSwa(1)).peers
    full_k, _, swa_k, swa_v = target.view(stamps=True).host().stamps
    assert [full_k[slot] for slot in slots] == [1, 2, 3, 4]
    assert [swa_k[peer] for peer in peers] == [-swa_v[peer] for peer in peers] == [5, 6, 7, 8]


def test_a_restored_row_has_the_stamps_that_it_had() -> None:
    target = target_after(ops.Extend(((1, 6),)), ops.Retract(1, 1), ops.Alloc(2, 3))
    answer = lent(target, ops.Restore(1, 3))
    full_k, full_v, swa_k, _ = target.view(stamps=True).host().stamps
    assert [full_k[slot] for slot in answer.slots] == [1, 2, 3, 4, 5, 6]
    assert [full_v[slot] for slot in answer.slots] == [-1, -2, -3, -4, -5, -6]
    assert [swa_k[peer] for peer in answer.peers] == [1, 2, 3, 4, 5, 6]


def test_a_restore_with_a_tail_brings_the_tail_alone_to_the_swa_side() -> None:
    target = target_after(ops.Alloc(1, 2), ops.Retract(1, 1))
    answer = lent(target, ops.Restore(1, 3, tail=4))
    _, _, swa_k, _ = target.view(stamps=True).host().stamps
    assert answer.peers[:4] == (0, 0, 0, 0)
    assert [swa_k[peer] for peer in answer.peers[4:]] == [5, 6, 7, 8]


# The view.


def test_a_view_is_frozen() -> None:
    target = target_after(*PAIR)
    view = target.view(stamps=True)
    tensors = [part.clone() for part in (*view.tensors(), *view.stamp_tensors())]
    for op in (ops.Free(1), ops.Alloc(3, 2), ops.Clear()):
        target.apply(op)
    for part, then in zip((*view.tensors(), *view.stamp_tensors()), tensors, strict=True):
        assert torch.equal(part, then)


def test_a_view_has_the_same_on_the_host_as_on_the_device() -> None:
    view = target_after(*PAIR, ops.FreeSwa(1)).view(stamps=True)
    host = view.host()
    lists = [host.full_free, host.swa_free, host.mapping, *host.stamps]
    assert [part.tolist() for part in (*view.tensors(), *view.stamp_tensors())] == lists
    assert view.host() is host
    assert host.answers is view.answers


@pytest.mark.parametrize(("geometry", "kinds"), [(HYBRID, 4), (SINGLE, 2)])
def test_contents_are_in_the_view_if_asked_for(geometry: Geometry, kinds: int) -> None:
    target = target_after(geometry=geometry)
    assert target.view(stamps=False).host().stamps == ()
    rows = target.view(stamps=True).host().stamps
    assert len(rows) == kinds
    assert len(rows[0]) == geometry.full_size + geometry.page_size


def test_one_pool_has_no_mapping_and_no_swa_side() -> None:
    host = target_after(*PAIR, geometry=SINGLE).view(stamps=False).host()
    assert host.mapping == []
    assert host.swa_free == []
    assert host.answers.swa_available == 0


def test_the_mapping_has_a_sentinel_and_room_for_the_padding_page() -> None:
    mapping = target_after().view(stamps=False).host().mapping
    assert len(mapping) == HYBRID.full_size + HYBRID.page_size + 1
    assert mapping[-1] == -1


def test_what_the_whole_answers_agrees_with_what_its_sides_answer() -> None:
    for program in ((), PAIR, (*PAIR, ops.FreeSwa(1), ops.GroupBegin(), ops.Free(2))):
        answers = target_after(*program).view(stamps=False).answers
        assert answers.outer == answers.inner
        assert answers.available == min(answers.full_available, answers.swa_available)


# Tensors that callers keep and overwrite (L8).


def test_the_last_answers_are_kept_untouched() -> None:
    target = target_after()
    slots = [lent(target, ops.Alloc(seq, 1)).slots for seq in range(1, HELD_ANSWERS + 3)]
    held = target.view(stamps=False).host().held
    assert held == {number: list(slots[number - 1]) for number in range(3, HELD_ANSWERS + 3)}


def test_an_answer_that_was_scribbled_over_is_not_kept() -> None:
    target = target_after(ops.Alloc(1, 1), ops.Alloc(2, 1, overwrite=True), ops.Decode((1,)))
    assert sorted(target.view(stamps=False).host().held) == [1, 3]


@pytest.mark.parametrize(
    "op",
    [
        ops.Alloc(3, 1, overwrite=True),
        ops.Extend(((3, 2),), overwrite=True),
        ops.Decode((1,), overwrite=True),
    ],
    ids=str,
)
def test_scribbling_over_a_lent_tensor_keeps_every_law(op: Op) -> None:
    run = Run(core_target(HYBRID))
    for step in (*PAIR, op, ops.Free(1)):
        assert not isinstance(run.step(step), Skipped)
    run.finish()


class ReadingOn(TokenToKVPoolAllocator):
    """Goes on reading the tensor that it lent (sglang#28494)."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super().alloc(need_size)
        self.lent = slots
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        super().free(self.lent if self.lent is not None else free_index)


def test_a_caller_really_scribbles_over_what_it_was_lent() -> None:
    parts = CoreParts(token=ReadingOn)
    target = target_after(ops.Alloc(1, 1, overwrite=True), geometry=SLOTS, parts=parts)
    answer = target.apply(ops.Free(1))
    assert isinstance(answer, Raised)
    assert answer.kind == "InvalidSlotError"


class Remembering(SWATokenToKVPoolAllocator):
    """Remembers the tensors that it was given to free."""

    def free(self, free_index: torch.Tensor) -> None:
        self.freed = free_index
        super().free(free_index)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_caller_scribbles_over_a_freed_tensor_only_if_the_op_says_so(overwrite: bool) -> None:
    built: list[Remembering] = []

    def build(*args: Any, **options: Any) -> Remembering:
        built.append(Remembering(*args, **options))
        return built[-1]

    target = core_target(HYBRID, parts=CoreParts(hybrid=build))
    slots = lent(target, ops.Alloc(1, 1)).slots
    target.apply(ops.GroupBegin())
    target.apply(ops.Free(1, overwrite=overwrite))
    assert built[0].freed.tolist() == ([0, 0, 0, 0] if overwrite else list(slots))


# Errors.


def test_an_error_becomes_an_answer_with_its_bases_and_first_line() -> None:
    class Odd(SWATokenToKVPoolAllocator):
        def alloc(self, need_size: int) -> torch.Tensor | None:
            raise KeyError("first\nsecond") if need_size > 4 else ValueError

    target = core_target(HYBRID, parts=CoreParts(hybrid=Odd))
    bases = ("KeyError", "LookupError", "Exception", "BaseException", "object")
    assert target.apply(ops.Alloc(1, 2)) == Raised("KeyError", r"'first\nsecond'", bases)
    assert target.apply(ops.Alloc(1, 1)) == Raised(
        "ValueError", "", ("ValueError", "Exception", "BaseException", "object")
    )


@pytest.mark.parametrize(
    "answer", [[4, 5, 6, 7], torch.ones(4), torch.ones((2, 2), dtype=torch.int64)], ids=str
)
def test_an_answer_that_is_no_vector_of_slots_is_an_error(answer: Any) -> None:
    class Odd(SWATokenToKVPoolAllocator):
        def alloc(self, need_size: int) -> torch.Tensor | None:
            return answer

    told = core_target(HYBRID, parts=CoreParts(hybrid=Odd)).apply(ops.Alloc(1, 1))
    assert isinstance(told, Raised)
    assert told.kind == "TypeError"
    assert "expected a vector of integer slots" in told.message


def test_an_interrupt_is_no_answer() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupt)


def test_a_target_that_takes_no_hostile_calls_says_so() -> None:
    pool = build_pool(SINGLE)
    allocator = PagedTokenToKVPoolAllocator(32, 4, torch.int64, "cpu", pool, False)
    target = AllocatorTarget(
        "tame",
        SINGLE,
        core_contract(SINGLE, validate=False),
        SingleDialect(allocator, torch.device("cpu")),
        StampedPool(pool),
    )
    with pytest.raises(RuntimeError, match="tame takes no hostile calls"):
        target.apply(ops.Hostile("free_padding"))


def test_a_closed_target_keeps_no_tensors() -> None:
    target = target_after(*PAIR)
    target.close()
    assert target.view(stamps=False).host().held == {}


# Callers that free tombstones on the full side alone.


def test_where_tombstones_are_freed_alone_a_retraction_goes_run_by_run() -> None:
    class Strict(SWATokenToKVPoolAllocator):
        """Wants a live peer of every slot that is freed, as releases do at page size 1."""

        def free(self, free_index: torch.Tensor) -> None:
            assert bool((self.translate_loc_from_full_to_swa(free_index) > 0).all())
            super().free(free_index)

    target = core_target(HYBRID, parts=CoreParts(hybrid=Strict))
    target.contract = msgspec.structs.replace(target.contract, live_frees=frozenset(("slots",)))
    run = Run(target)
    for step in (ops.Extend(((1, 18),)), ops.FreeSwa(1, 1, 3), ops.Retract(1, 1)):
        assert not isinstance(run.step(step), Skipped)
    run.finish()


# What a core target is made of.


def test_without_validation_only_what_values_do_not_tell_is_on_trial() -> None:
    assert core_contract(HYBRID, validate=True).hostile == set(HOSTILE_CALLS)
    blind = {name for name, call in HOSTILE_CALLS.items() if not call.values}
    assert core_contract(HYBRID, validate=False).hostile == blind


def test_a_target_bears_its_name_and_geometry() -> None:
    target = core_target(SLOTS, name="mine")
    assert (target.name, target.geometry) == ("mine", SLOTS)
    assert core_target(SLOTS).name == "kvcore"


@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("sizes", [(4, 8, 6), (4, 8, 0), (1, 8, 0)], ids=str)
def test_free_pages_are_counted_whether_sorted_or_not(
    sizes: tuple[int, int, int], need_sort: bool
) -> None:
    geometry = Geometry(*sizes, need_sort)
    target = target_after(ops.Alloc(1, 3), ops.Free(1), geometry=geometry)
    host = target.view(stamps=False).host()
    assert sorted(host.full_free) == list(range(1, geometry.full_pages + 1))
    assert sorted(host.swa_free) == list(range(1, geometry.swa_pages + 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda dialect, slots: dialect.swa_tail(0, 4, -1, 4),
        lambda dialect, slots: dialect.free_swa(slots, "slots", 0),
        lambda dialect, slots: dialect.recover(slots, slots),
        lambda dialect, slots: dialect.alloc_full(4),
        lambda dialect, slots: dialect.alloc_swa(4),
        lambda dialect, slots: dialect.free_unpaired_swa(slots),
        lambda dialect, slots: dialect.map(slots, slots),
    ],
    ids=["swa_tail", "free_swa", "recover", "alloc_full", "alloc_swa", "free_unpaired_swa", "map"],
)
def test_calls_of_the_hybrid_allocator_are_type_errors_on_one_pool(
    call: Callable[[SingleDialect, torch.Tensor], object],
) -> None:
    allocator = PagedTokenToKVPoolAllocator(32, 4, torch.int64, "cpu", None, False)
    with pytest.raises(TypeError, match="a single pool has no"):
        call(SingleDialect(allocator, torch.device("cpu")), torch.tensor([4]))


@pytest.mark.parametrize(("pages", "cut"), [(0, 0), (1, 0), (2, 1), (5, 2)])
def test_two_segments_are_cut_at_a_page_boundary(pages: int, cut: int) -> None:
    allocator = PagedTokenToKVPoolAllocator(64, 4, torch.int64, "cpu", None, False)
    dialect = SingleDialect(allocator, torch.device("cpu"))
    slots = torch.arange(4, 4 + pages * 4)
    (first, at), (second, then) = dialect.halves(slots, 8)
    assert (at, then) == (8, 8 + cut * 4)
    assert torch.equal(torch.cat([first, second]), slots)
    assert len(first) == cut * 4
