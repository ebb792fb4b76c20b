"""What a law is shown: the model, the op, its outcome, and the views around it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvcore.models import Clause, Model, Outcome
from kvcore.models.ops import Op
from kvcore.models.state import Side
from kvcore.targets.protocol import HostView, View


class Check(msgspec.Struct):
    """One moment of a run, after the model followed the outcome. ``before`` is the view before the
    op if one was taken; ``held`` the slots of earlier answers by number; ``drained`` whether
    everything was given back; ``mapping_right`` is worked out by the laws that ask."""

    model: Model
    op: Op
    outcome: Outcome
    before: View | None
    after: View
    held: dict[int, list[int]]
    drained: bool = False
    mapping_right: bool | None = None
    _host: HostView | None = None

    @property
    def host(self) -> HostView:
        """The view after the op in plain lists, made when a law first asks for it."""
        if (listed := self.after.listed) is not None:
            return listed
        if self._host is None:
            self._host = self.after.host()
        return self._host

    def sides(self) -> list[tuple[str, Side, list[int]]]:
        """(name, the model's side, free pages seen) for each pool."""
        sides = [("full", self.model.full, self.host.full_free)]
        if self.model.geometry.hybrid:
            sides.append(("swa", self.model.swa, self.host.swa_free))
        if self.model.geometry.sparse:
            sides.append(("device", self.model.device, self.host.device_free))
        if self.model.geometry.requests:
            sides.append(("request", self.model.requests, self.host.request_free))
        return sides


LawForm = Callable[[Check], list[Clause]]
