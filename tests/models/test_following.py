"""What the model remembers after a right answer: rows, peers, groups, recoveries, host copies.

Expected values follow from the meaning of the op, never from page ids: they are read before the op
and compared after it.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.models import Contract, ops
from kvcore.models.state import NO_PEER, UNKNOWN

PAIR = (ops.Alloc(1, 2), ops.Alloc(2, 2))
DEAD = (*PAIR, ops.FreeSwa(1))


@pytest.fixture
def books(keep: Callable[..., Any]) -> Any:
    return keep()


def full_stamps(books: Any, seq: int) -> list[int]:
    return [stamp for page in books.pages(seq) for stamp in page.full_stamps]


def swa_stamps(books: Any, seq: int) -> list[int]:
    return [stamp for page in books.pages(seq) for stamp in page.swa_stamps]


def partition(books: Any) -> None:
    """L1 and L3 on the model itself: every page of each side in exactly one place."""
    model = books.model
    full = [page.full for _, page in model.lent_pages()]
    swa = [page.swa for _, page in model.lent_pages() if page.swa]
    for side, lent in ((model.full, full), (model.swa, swa)):
        everywhere = [*side.free, *side.pending, *lent]
        assert sorted(everywhere) == list(range(1, side.total + 1))


def test_every_token_lent_gets_the_next_stamp_on_both_sides(books: Any) -> None:
    books.do(ops.Extend(((1, 3), (2, 2))), ops.Decode((2, 1)))
    assert full_stamps(books, 1) == swa_stamps(books, 1) == [1, 2, 3, 7]
    assert full_stamps(books, 2) == swa_stamps(books, 2) == [4, 5, 6]
    partition(books)


def test_tokens_before_an_swa_tail_have_no_peer(books: Any) -> None:
    books.do(ops.SwaTail(1, 7, 3))
    assert swa_stamps(books, 1) == [NO_PEER] * 4 + [5, 6, 7]
    assert books.swa_pages(1)[0] == 0
    partition(books)


def test_tokens_into_a_live_page_before_an_swa_tail_have_no_peer(books: Any) -> None:
    books.do(ops.Extend(((1, 2),)), ops.SwaTail(1, 4, 2))
    assert swa_stamps(books, 1) == [1, 2, NO_PEER, NO_PEER, 5, 6]
    assert not books.pages(1)[0].fully_mapped
    partition(books)


def test_tokens_beyond_a_tail_have_no_peer(books: Any) -> None:
    books.do(ops.SwaTail(1, 11, 5, 2))
    assert swa_stamps(books, 1) == [NO_PEER] * 4 + [5, 6, 7, 8, 9] + [NO_PEER] * 2
    assert [swa != 0 for swa in books.swa_pages(1)] == [False, True, True]
    partition(books)


def test_a_page_wholly_beyond_a_tail_has_no_peer(books: Any) -> None:
    books.do(ops.SwaTail(1, 9, 4, 5))
    assert [swa != 0 for swa in books.swa_pages(1)] == [True, False, False]
    partition(books)


def test_names_are_remembered_as_used(books: Any) -> None:
    assert books.model.last_name == 0
    books.do(ops.Alloc(7, 1), ops.Free(7), ops.Alloc(3, 1))
    assert books.model.used == {3, 7}
    assert books.model.last_name == 7


def test_a_refused_name_is_not_used(books: Any) -> None:
    books.do(ops.Alloc(7, 99))
    assert books.model.allows(ops.Alloc(7, 1))


def test_a_freed_row_is_free_on_both_sides(books: Any) -> None:
    books.do(*PAIR)
    full, swa = books.full_pages(1), books.swa_pages(1)
    books.do(ops.Free(1))
    assert 1 not in books.model.rows
    assert books.model.full.free >= set(full)
    assert books.model.swa.free >= set(swa)
    assert books.model.ghosts[1] == tuple(full)
    partition(books)


def test_a_row_closes_up_over_a_freed_part(books: Any) -> None:
    books.do(ops.Alloc(1, 3))
    first, second, third = books.pages(1)
    books.do(ops.Free(1, 1, 2))
    assert books.pages(1) == [first, third]
    assert books.model.ghosts[1] == (second.full,)
    partition(books)


def test_free_swa_gives_up_the_peers_alone(books: Any) -> None:
    books.do(*PAIR)
    full, swa, stamps = books.full_pages(1), books.swa_pages(1), full_stamps(books, 1)
    books.do(ops.FreeSwa(1, 0, 1))
    assert books.full_pages(1) == full
    assert books.swa_pages(1) == [0, swa[1]]
    assert full_stamps(books, 1) == stamps
    assert swa_stamps(books, 1)[:4] == [NO_PEER] * 4
    assert swa[0] in books.model.swa.free
    partition(books)


def test_tombstones_have_no_peer_to_give_up(books: Any) -> None:
    books.do(*DEAD)
    before = books.snapshot()
    books.do(ops.FreeSwa(1))
    assert books.snapshot() == before


def test_free_full_frees_tombstones(books: Any) -> None:
    books.do(*DEAD)
    full = books.full_pages(1)
    books.do(ops.FreeFull(1, 1, 2))
    assert books.full_pages(1) == full[:1]
    assert full[1] in books.model.full.free
    partition(books)


# Groups.


@pytest.mark.parametrize("op", [ops.Free(1), ops.Retract(1, 1)], ids=["free", "retract"])
def test_pages_freed_in_a_group_wait_for_its_end(books: Any, op: ops.Op) -> None:
    books.do(*PAIR, ops.GroupBegin())
    full, swa = books.full_pages(1), books.swa_pages(1)
    books.do(op)
    assert books.model.full.pending == set(full)
    assert books.model.swa.pending == set(swa)
    assert books.model.full.free.isdisjoint(full)
    partition(books)

    books.do(ops.GroupEnd())
    assert books.model.full.free >= set(full)
    assert books.model.swa.free >= set(swa)
    assert not books.model.full.pending
    assert not books.model.group_open
    partition(books)


def test_until_the_end_of_the_group_the_old_peer_may_still_be_seen(books: Any) -> None:
    books.do(*PAIR, ops.FreeSwa(2, 0, 1), ops.GroupBegin())
    pairs = dict(zip(books.full_pages(1), books.swa_pages(1), strict=True))
    books.do(ops.FreeSwa(1))
    assert books.model.detached == pairs
    books.do(ops.GroupEnd())
    assert books.model.detached == {}


def test_free_full_in_a_group_waits_and_detaches_nothing(books: Any) -> None:
    books.do(*DEAD, ops.GroupBegin())
    full = books.full_pages(1)
    books.do(ops.FreeFull(1))
    assert books.model.full.pending == set(full)
    assert books.model.detached == {}
    partition(books)


# Recoveries.


def test_a_locked_recovery_keeps_the_slots_and_takes_the_peers(books: Any) -> None:
    books.do(*DEAD)
    kept, kept_stamps = books.full_pages(1), full_stamps(books, 1)
    given_up, peers = books.full_pages(2), books.swa_pages(2)
    peer_stamps = swa_stamps(books, 2)
    books.do(ops.Recover(1, 2, locked=True, pages=2))
    assert books.full_pages(1) == kept
    assert full_stamps(books, 1) == kept_stamps
    assert books.swa_pages(1) == peers
    assert swa_stamps(books, 1) == peer_stamps
    assert 2 not in books.model.rows
    assert books.model.full.free >= set(given_up)
    assert books.model.ghosts[2] == tuple(given_up)
    partition(books)


def test_an_unlocked_recovery_replaces_the_slots(books: Any) -> None:
    books.do(*DEAD)
    given_up = books.full_pages(1)
    incoming, peers = books.full_pages(2), books.swa_pages(2)
    incoming_stamps = full_stamps(books, 2)
    books.do(ops.Recover(1, 2, locked=False, pages=2))
    assert books.full_pages(1) == incoming
    assert books.swa_pages(1) == peers
    assert full_stamps(books, 1) == swa_stamps(books, 1) == incoming_stamps
    assert 2 not in books.model.rows
    assert books.model.full.free >= set(given_up)
    assert books.model.ghosts[1] == tuple(given_up)
    partition(books)


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "unlocked"])
def test_a_recovery_of_one_page_leaves_the_others(books: Any, locked: bool) -> None:
    books.do(*DEAD)
    kept, incoming = books.full_pages(1), books.full_pages(2)
    peers = books.swa_pages(2)
    books.do(ops.Recover(1, 2, locked, 1, kept_start=1, incoming_start=0))
    assert books.full_pages(1) == [kept[0], kept[1] if locked else incoming[0]]
    assert books.swa_pages(1) == [0, peers[0]]
    assert books.full_pages(2) == incoming[1:]
    partition(books)


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "unlocked"])
def test_slots_given_up_by_a_recovery_in_a_group_wait_for_its_end(books: Any, locked: bool) -> None:
    books.do(*PAIR, ops.GroupBegin(), ops.FreeSwa(1))
    given_up = books.full_pages(2 if locked else 1)
    old_peers = set(books.model.detached.values())
    books.do(ops.Recover(1, 2, locked, pages=2))
    assert books.model.full.pending == set(given_up)
    assert books.model.swa.pending == old_peers
    partition(books)
    books.do(ops.GroupEnd())
    partition(books)


def test_where_the_full_side_joins_no_group_a_locked_recovery_frees_at_once(
    keep: Callable[..., Any],
) -> None:
    books = keep(contract=Contract(full_side_joins_group=False))
    books.do(*PAIR, ops.GroupBegin(), ops.FreeSwa(1))
    given_up = books.full_pages(2)
    books.do(ops.Recover(1, 2, locked=True, pages=2))
    assert books.model.full.free >= set(given_up)
    assert not books.model.full.pending
    partition(books)


def test_where_free_swa_joins_no_group_peers_are_free_at_once(keep: Callable[..., Any]) -> None:
    books = keep(contract=Contract(free_swa_joins_group=False))
    books.do(*PAIR, ops.GroupBegin())
    peers = books.swa_pages(1)
    books.do(ops.FreeSwa(1))
    assert books.model.swa.free >= set(peers)
    assert not books.model.swa.pending
    assert books.model.detached == {}
    partition(books)


def test_where_free_swa_joins_no_group_a_free_still_does(keep: Callable[..., Any]) -> None:
    books = keep(contract=Contract(free_swa_joins_group=False))
    books.do(*PAIR, ops.GroupBegin())
    peers = books.swa_pages(1)
    books.do(ops.Free(1))
    assert books.model.swa.pending == set(peers)
    partition(books)


# Load-backs.


def test_a_load_back_has_peers_for_its_last_pages(books: Any) -> None:
    books.do(ops.LoadBack(1, 3, 1))
    assert [swa != 0 for swa in books.swa_pages(1)] == [False, False, True]
    partition(books)


def test_an_swa_load_back_stamps_the_swa_side_anew(books: Any) -> None:
    books.do(*DEAD)
    stamps, last = full_stamps(books, 1), books.model.stamps
    books.do(ops.LoadBackSwa(1, 1, 2))
    assert full_stamps(books, 1) == stamps
    assert swa_stamps(books, 1) == [NO_PEER] * 4 + [last + 1, last + 2, last + 3, last + 4]
    partition(books)


def test_an_swa_load_back_of_a_whole_row_gives_each_page_its_own_peer(books: Any) -> None:
    books.do(*DEAD)
    last = books.model.stamps
    books.do(ops.LoadBackSwa(1))
    assert len(set(books.swa_pages(1))) == 2
    assert swa_stamps(books, 1) == list(range(last + 1, last + 9))
    partition(books)


# Retraction.


def test_a_retracted_row_lives_on_in_its_backup(books: Any) -> None:
    books.do(ops.SwaTail(1, 6, 2))
    full, swa = full_stamps(books, 1), swa_stamps(books, 1)
    books.do(ops.Retract(1, 5))
    assert 1 not in books.model.rows
    assert books.model.backups[5].full_stamps == full
    assert books.model.backups[5].swa_stamps == swa
    partition(books)


def test_a_peer_given_up_inside_the_group_may_be_in_the_backup_or_not(books: Any) -> None:
    books.do(ops.Alloc(1, 2), ops.FreeSwa(1, 1, 2), ops.GroupBegin(), ops.FreeSwa(1, 0, 1))
    books.do(ops.Retract(1, 5))
    assert books.model.backups[5].swa_stamps == [UNKNOWN] * 4 + [NO_PEER] * 4


def test_a_restored_row_holds_what_the_backup_held(books: Any) -> None:
    books.do(*PAIR, ops.Extend(((1, 1),)))
    full, swa = full_stamps(books, 1), swa_stamps(books, 1)
    books.do(ops.Retract(1, 5), ops.Alloc(3, 2), ops.Restore(5, 4))
    assert full_stamps(books, 4) == full
    assert swa_stamps(books, 4) == swa
    assert 5 not in books.model.backups
    partition(books)


def test_a_restore_gives_no_new_stamps(books: Any) -> None:
    books.do(*PAIR, ops.Retract(1, 5))
    last = books.model.stamps
    books.do(ops.Restore(5, 3), ops.Decode((3,)))
    assert books.model.stamps == last + 1
    assert full_stamps(books, 3)[-1] == last + 1


def test_where_the_old_slot_had_no_peer_the_new_one_holds_nothing_known(books: Any) -> None:
    books.do(ops.SwaTail(1, 8, 4), ops.Retract(1, 5))
    kept = books.model.backups[5].swa_stamps[4:]
    books.do(ops.Restore(5, 2))
    assert swa_stamps(books, 2) == [UNKNOWN] * 4 + kept
    assert all(page.fully_mapped for page in books.pages(2))


def test_where_the_new_slot_has_no_peer_nothing_is_restored(books: Any) -> None:
    books.do(ops.Alloc(1, 2), ops.Retract(1, 5))
    kept = books.model.backups[5].swa_stamps[4:]
    books.do(ops.Restore(5, 2, tail=4))
    assert swa_stamps(books, 2) == [NO_PEER] * 4 + kept


def test_what_is_not_known_stays_so_through_a_second_retraction(books: Any) -> None:
    books.do(ops.SwaTail(1, 4, 0), ops.Retract(1, 5), ops.Restore(5, 2), ops.Retract(2, 6))
    assert books.model.backups[6].swa_stamps == [UNKNOWN] * 4


def test_a_refused_restore_keeps_the_backup(books: Any) -> None:
    books.do(*PAIR, ops.Retract(1, 5), ops.Alloc(3, 6), ops.Restore(5, 4))
    assert 5 in books.model.backups
    books.do(ops.Free(3), ops.Restore(5, 4))
    assert len(books.pages(4)) == 2


def test_a_row_of_one_pool_is_restored_too(keep: Callable[..., Any]) -> None:
    books = keep(swa_pages=0)
    books.do(*PAIR)
    stamps = full_stamps(books, 1)
    books.do(ops.Retract(1, 5))
    assert books.model.backups[5].evicted == 0
    books.do(ops.Restore(5, 3))
    assert full_stamps(books, 3) == stamps
    assert swa_stamps(books, 3) == [NO_PEER] * 8


# Relocation.


def test_a_relocated_row_has_new_pages_and_keeps_its_stamps(books: Any) -> None:
    books.do(ops.Alloc(1, 1), ops.Extend(((1, 2),)))
    full, swa = books.full_pages(1), books.swa_pages(1)
    before, last = (full_stamps(books, 1), swa_stamps(books, 1)), books.model.stamps
    books.do(ops.Relocate(1))
    assert set(full).isdisjoint(books.full_pages(1))
    assert set(swa).isdisjoint(books.swa_pages(1))
    assert (full_stamps(books, 1), swa_stamps(books, 1)) == before
    assert books.model.stamps == last
    assert books.model.full.free >= set(full)
    assert books.model.swa.free >= set(swa)
    assert books.model.ghosts[1] == tuple(full)
    partition(books)


def test_a_relocated_token_without_a_peer_has_one_that_holds_nothing_known(books: Any) -> None:
    books.do(ops.SwaTail(1, 6, 2), ops.Relocate(1))
    assert swa_stamps(books, 1) == [UNKNOWN] * 4 + [5, 6]
    assert all(books.swa_pages(1))
    partition(books)


def test_a_relocation_in_a_group_leaves_the_old_pages_waiting(books: Any) -> None:
    books.do(ops.Alloc(1, 2), ops.GroupBegin())
    full, swa = books.full_pages(1), books.swa_pages(1)
    books.do(ops.Relocate(1))
    assert books.model.full.pending == set(full)
    assert books.model.swa.pending == set(swa)
    assert books.model.detached == dict(zip(full, swa, strict=True))
    partition(books)


def test_a_row_of_one_pool_is_relocated_too(keep: Callable[..., Any]) -> None:
    books = keep(swa_pages=0)
    books.do(*PAIR, ops.Relocate(1))
    assert full_stamps(books, 1) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert swa_stamps(books, 1) == [NO_PEER] * 8
    partition(books)


# Clear.


def test_a_clear_drops_rows_and_group_and_keeps_backups(books: Any) -> None:
    books.do(*PAIR, ops.Retract(1, 5), ops.Alloc(3, 1), ops.GroupBegin(), ops.FreeSwa(2))
    rows = {seq: tuple(books.full_pages(seq)) for seq in (2, 3)}
    books.do(ops.Clear())
    assert books.model.rows == {}
    assert not books.model.group_open
    assert books.model.detached == {}
    assert books.model.full.free == books.model.swa.free == set(range(1, 9))
    assert rows.items() <= books.model.ghosts.items()
    assert books.model.allows(ops.Restore(5, 4))
    assert not books.model.allows(ops.Alloc(2, 1))
    partition(books)
