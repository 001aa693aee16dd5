"""The competitors: `variants/<op>/<name>.py`, one file a variant."""
