"""Writing what the notebook sent into a rank's own objects, and telling beforehand whether that is enough."""

from __future__ import annotations

from typing import Any

from nbdist.shipping.chunks import Patch
from nbdist.shipping.classify import KINDS
from nbdist.shipping.errors import CannotReceive
from nbdist.shipping.explain import reason_of
from nbdist.shipping.kinds import MISSING, CannotApply
from nbdist.shipping.message import BULKS, UPDATE
from nbdist.shipping.patching import PATCHED, missing
from nbdist.shipping.plain import BULK
from nbdist.shipping.spread import home_class, is_managed, is_spread
from nbdist.shipping.table import Table, Token
from nbdist.shipping.unpacking import Unpacked


def not_brought(table: Table, received: Unpacked) -> dict[Token, str]:
    """What changes in pieces do not bring here: ranks may have written other things into their own copies."""
    found: dict[Token, str] = {}
    for sort, token, content in received.values:
        if sort == UPDATE and content[0] in PATCHED and type(content[1][0]) is Patch:
            what = missing(table.find(token), content[1][0], received.digests[token])
            if what:
                found[token] = what
    return found


_REPLACED = (
    "{name!r} of a {kind} is sharded, and the notebook has put another parameter in its place. Write into it (`with "
    "torch.no_grad(): {name}.copy_(...)`); or make the model anew (`model = copy.deepcopy(model)`), its optimizer too, "
    "and prepare them"
)


def check_parameters(table: Table, received: Unpacked) -> None:
    """What fully_shard has sharded computes with its own record of the parameters: another one would go unseen.

    Raises:
        CannotReceive: the notebook has put another parameter in the place of one that is sharded here.
    """
    for sort, token, content in received.values:
        if sort != UPDATE or content[0] != "D" or not any(is_spread(one) for one in table.find(token).values()):
            continue
        part = table.find(token)
        for name, new in content[1][1]:
            old = part.get(name)
            if not is_spread(old) or is_spread(new) or new is None:
                continue
            for module in table.objects.values():
                if is_managed(module) and module._parameters is part:
                    raise CannotReceive("", _REPLACED.format(name=name, kind=home_class(type(module)).__name__))


def write(table: Table, received: Unpacked) -> list[Token]:
    """Take over what is new, and make the changes; the tokens of all that.

    Raises:
        CannotReceive: a change cannot be written into this rank's object.
    """
    touched: list[Token] = []
    bulk = {id(value) for sort, _, content in received.values if sort == BULKS for value in content}
    for token, value in received.new:
        table.put(token, value)
        touched.append(token)
        if id(value) in bulk:
            table.walker.bulk.add(token)
        else:
            table.came_opened(value)
    for sort, key, content in received.values:
        if sort == UPDATE:
            letter, change = content
            value = table.find(key)
            try:
                KINDS[letter].apply(value, change)
            except CannotApply as error:
                _rebind(table, key, value, error)
            except Exception as error:
                raise CannotReceive("", f"a change cannot be made here: {reason_of(error)}") from error
            touched.append(key)
            if letter == BULK.letter:
                table.walker.bulk.add(key)
            else:
                table.came_opened(table.find(key))
    return touched


def _rebind(table: Table, token: Token, value: Any, error: CannotApply) -> None:
    """An object cannot be changed in place (an iterator, for example): its names get the new one."""
    if error.instead is MISSING:
        raise CannotReceive("", f"a change cannot be made here: {reason_of(error)}") from error
    for name in [name for name, bound in table.namespace.items() if bound is value]:
        table.namespace[name] = error.instead
    table.put(token, error.instead)
