"""What a rank and its notebook must agree on, byte for byte: records of output, the black box, the rarer signal."""

from __future__ import annotations

import select
import signal
import struct

# Output records: kind, length of the body, number of the cell that wrote it (0: none). One write of at most PIPE_BUF
# bytes each, which the kernel keeps in one piece.
RECORD = struct.Struct("<cHI")
PIECE = min(4000, getattr(select, "PIPE_BUF", 512) - 12)  # bytes of a body: with its head below PIPE_BUF
OUT, ERR, DISPLAY_PART, DISPLAY, MARK = b"o", b"e", b"d", b"D", b"m"

# The black box: time.monotonic(), line, file name; behind it, from FAULT_AT on, faulthandler's text.
PLACE = struct.Struct("<di200s")
FAULT_AT = 512
ENDED_AT = 504  # the number of the last cell whose code has ended on this rank; its results may still be packed
ENDED = struct.Struct("<Q")
BLACK_BOX_SIZE = 65536

# Stops code that swallows KeyboardInterrupt. A rare one, so that a cell which ignores SIGINT or SIGUSR1 is still
# reached.
HARD_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

# Files of a rank, in this order: control socket, stdout, stderr, records, black box.
FILES_A_RANK = 5

# Where a rank keeps what the function of `nbdist.launch` returned.
RESULT = "__nbdist_result__"
