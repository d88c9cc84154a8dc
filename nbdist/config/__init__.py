"""What the user chose, and what is here."""
