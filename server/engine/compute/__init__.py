"""Forward passes of one step: runners, ragged attention, the draft model."""
