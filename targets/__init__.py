"""What is on trial: the target protocol and its implementations; and `record`, for live ones."""

from kvcore.targets.recorder import Recording, record

__all__ = ["Recording", "record"]
