"""What knows IPython: the magics, the capture of a cell, output, errors."""
