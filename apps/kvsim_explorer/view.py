"""What every page is given: the recording and the policies that the sidebar chose."""

from dataclasses import dataclass, replace

from kvsim import Budget, KvsimError, Policy, Trace, parse

__all__ = ["MOST_POLICIES", "View", "read_policies"]

MOST_POLICIES = 6


@dataclass(frozen=True)
class View:
    """The choices that pages have in common.

    Attributes
    ----------
    trace : Trace
        The recording.
    location : str
        Where it lies, as a command would name it.
    policy : Policy
        The chosen one, with its budget.
    others : tuple of Policy
        Those it is compared with, with their budgets.
    budget : Budget
        For policies without one.
    shadow : bool
        Evict nothing; rank all positions at every step.
    """

    trace: Trace
    location: str
    policy: Policy
    others: tuple[Policy, ...]
    budget: Budget
    shadow: bool

    @property
    def policies(self) -> list[Policy]:
        """The chosen policy and the others, each once."""
        return list(dict.fromkeys([self.policy, *self.others]))

    def text_of(self, policy: Policy) -> str:
        """Give a policy as it is written beside ``--budget``: without the budget that all have in common."""
        return str(replace(policy, budget=None) if policy.budget == self.budget else policy)


def read_policies(text: str, budget: Budget) -> tuple[list[Policy], list[str]]:
    """Read policies, one a line; give those that can be read, and what is wrong with the others.

    Parameters
    ----------
    text : str
        Policy strings; empty lines do not count.
    budget : Budget
        For those without one.
    """
    found: list[Policy] = []
    wrong: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            found.append(parse(line).with_budget(budget))
        except KvsimError as error:
            wrong.append(str(error))
    return found, wrong
