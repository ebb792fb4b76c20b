"""What the callers of a target may do: the model's rules are narrowed by it.

A contract keeps findings honest: a program that breaks a precondition which a release states is a
caller's fault and never runs. `kvcore`'s own contract is the widest.
"""

from __future__ import annotations

import msgspec

from kvcore.models.ops import OP_KINDS, Form

ALL_FORMS: frozenset[Form] = frozenset(("slots", "sparse", "segment", "segments"))


class Contract(msgspec.Struct, frozen=True):
    """Which ops and variants are in.

    ``ops``: kinds that callers use. ``free_forms``, ``free_swa_forms``: how pages may be
    named in each.
    ``live_frees``: pages given to ``free`` must all have a live peer, by form.
    ``live_swa_frees``: the same for ``free_swa``.
    ``overwrite_lent``, ``overwrite_deferred``: whether callers scribble over tensors that they were
    handed, or that they handed to a free inside a group.
    ``exhaustion``: whether programs may ask for more than there is.
    ``full_side_joins_group``: whether full slots given up by a recovery wait for the group's end.
    ``free_swa_joins_group``: the same for ``free_swa``.
    ``locked_recovery``: whether callers ever recover a tombstone whose full value is locked.
    ``tail_ends_early``: whether an SWA tail may end before its row does.
    ``hostile``: the contract-breaking calls on trial.
    """

    ops: frozenset[str] = frozenset(OP_KINDS)
    free_forms: frozenset[Form] = ALL_FORMS
    free_swa_forms: frozenset[Form] = ALL_FORMS
    live_frees: frozenset[Form] = frozenset()
    live_swa_frees: frozenset[Form] = frozenset()
    overwrite_lent: bool = True
    overwrite_deferred: bool = True
    exhaustion: bool = True
    full_side_joins_group: bool = True
    free_swa_joins_group: bool = True
    locked_recovery: bool = True
    tail_ends_early: bool = True
    hostile: frozenset[str] = frozenset()
