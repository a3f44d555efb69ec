"""The one exception for what a user can mend: every rank raises it alike, the main process prints its sentence."""


class UserError(ValueError):
    """A mistake in settings, data or environment; its message names the value, the reason and the fix."""
