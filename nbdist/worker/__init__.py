"""Code that runs inside a rank, around the user's."""
