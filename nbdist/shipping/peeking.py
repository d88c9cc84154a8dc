"""Looking into a rank from outside: a copy of one value, apart from the graph that both sides share."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from nbdist.shipping.errors import in_words
from nbdist.shipping.giving import why
from nbdist.shipping.memory import Parcel
from nbdist.shipping.message import EXTRA, Encoder, Frame, FrameFailed, TooLarge
from nbdist.shipping.table import Table, Token


def peek(
    encoder: Encoder,
    table: Table,
    look: Callable[[str, str], Any],
    rank: int,
    name: str,
    attributes: tuple[str, ...],
    limit: int,
) -> Parcel:
    """Pack a value for `Home.unpack`, or why it is not there or cannot leave.

    Args:
        encoder, table: the rank's own. Only its classes are sent as what the notebook knows.
        look: takes a key and a label; returns the object, or raises NameError.
        rank: this rank.
        name: a name, or the key of a handle.
        attributes: to be read one after the other.
        limit: bytes; beyond it the value stays.
    """
    label = name.split("@")[0]
    envelope: dict[str, Any] = {"error": None, "rank": rank}
    try:
        value = look(name, label)
        for attribute in attributes:
            value = getattr(value, attribute)
    except Exception as error:
        envelope["error"] = _sendable(error)
        return Parcel(pickle.dumps(envelope, 5))
    facts = {"type": type(value).__name__, "key": name, "label": label, "path": attributes, "size": None, "reason": ""}
    envelope["described"] = facts

    def known(key: int) -> Token:
        token = table.tokens.get(key)
        return token if token is not None and isinstance(table.objects[token], type) else None

    try:
        packed = encoder.encode([Frame(EXTRA, None, value)], {}, known, lambda key: None, limit)
    except FrameFailed as failure:
        envelope["stays"] = {**facts, "reason": why(encoder, table.tokens.get, label, value, failure.error)}
    except TooLarge as failure:
        envelope["stays"] = {**facts, "reason": f"over the limit of {in_words(limit)}", "size": failure.size}
    else:
        return Parcel(pickle.dumps({**envelope, **packed.envelope()}, 5), packed.files)
    return Parcel(pickle.dumps(envelope, 5))


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return AttributeError(str(error))
