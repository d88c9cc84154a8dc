"""HOW processes start: the pool of ranks behind a notebook, and `nbdist.launch`."""
