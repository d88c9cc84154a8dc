"""How objects travel between the notebook and the ranks."""
