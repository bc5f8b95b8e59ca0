"""Attention back-ends on the shapes of facts' `jamba-100m` and of a 7B-like layer: microseconds a call."""
