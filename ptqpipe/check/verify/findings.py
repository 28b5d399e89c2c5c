"""The findings of a verification: faults and notes, each with the check, the tensor or file, and what was expected."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ptqpipe.errors import PtqError, first_line

# What a damaged file can make Python raise before it is checked. Anything else is a bug and keeps its trace.
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError, OSError)


@dataclass(frozen=True, slots=True)
class Finding:
    """One deviation. ``check`` is a short identifier, ``where`` a tensor, file or config key.

    fault  whether it makes the checkpoint wrong or unreadable; else it is a note on what a reader or a better search
           would do
    """

    fault: bool
    check: str
    where: str
    message: str

    def to_json(self) -> dict[str, str]:
        """JSON values; severity is given by the list that holds it."""
        return {"check": self.check, "where": self.where, "message": self.message}


@dataclass(slots=True)
class Findings:
    """Collects findings.

    own     the checkpoint says that ptqpipe wrote it, so that every deviation of the layout is a fault
    chosen  it also chose the numbers and what is kept; a change of layout takes over those of another tool
    """

    own: bool
    chosen: bool
    items: list[Finding] = field(default_factory=list)

    def fault(self, check: str, where: str, message: str) -> None:
        self.items.append(Finding(True, check, where, " ".join(message.split())))

    def note(self, check: str, where: str, message: str) -> None:
        self.items.append(Finding(False, check, where, " ".join(message.split())))

    def deviation(self, check: str, where: str, message: str) -> None:
        """A fault of what ptqpipe wrote, a note about another tool's."""
        (self.fault if self.own else self.note)(check, where, message)

    def choice(self, check: str, where: str, message: str) -> None:
        """A fault of what ptqpipe chose, a note about another tool's choice, whoever wrote it down."""
        (self.fault if self.chosen else self.note)(check, where, message)

    def extend(self, others: Iterable[Finding]) -> None:
        self.items.extend(others)

    def guard(self, check: str, where: str, action: Callable[[], None]) -> None:
        """Runs a check; an error that the damaged input causes becomes a fault, since what cannot be checked fails."""
        try:
            action()
        except PtqError as error:
            self.fault(check, where, str(error))
        except _DAMAGE as error:
            self.fault(check, where, f"cannot be checked: {type(error).__name__} {first_line(error)[:200]}")
