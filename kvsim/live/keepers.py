"""From a policy's ``admit`` axis to a `Gatekeeper` of a model."""

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.admissions.wgkv import Wgkv
from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.live.gate import Unrotated
from kvsim.live.gatekeeper import FixedKeeper, GateKeeper, Gatekeeper
from kvsim.live.prefix import Prefix, prefill
from kvsim.live.run_trace import RunTrace
from kvsim.live.sequence import admission_name, live_policy
from kvsim.plan import Groups
from kvsim.policy import Policy, parse
from kvsim.protect import Protect
from kvsim.rope import rope_of_config
from kvsim.scorers.attention import Attention
from kvsim.when import When
from kvsim.write_gate import load_gate

__all__ = ["keeper_of", "keepers_of", "prefill_under"]


def keeper_of(
    model: Any, policy: Policy, eligible: str | tuple[int, ...] = "full", *, probe: Prefix | None = None
) -> Gatekeeper | None:
    """Put a policy's admission to work in a model.

    Parameters
    ----------
    model : PreTrainedModel
    policy : Policy
    eligible : {"full", "all"} or tuple of int
        Layers that policies decide about.
    probe : Prefix, optional
        Any prompt of the model without admission; one token is run where there is none.

    Returns
    -------
    Gatekeeper or None
        None if the policy admits everything.

    Raises
    ------
    PolicyError
        If the admission reads the future, or its file is not for this model.
    """
    admit, name = policy.expand().admit, admission_name(policy)
    if admit is None or name is None:
        return None
    live_policy(policy)
    probe = prefill(model, [0], eligible=eligible) if probe is None else probe
    places = tuple(probe.eligible)
    layers = tuple(probe.layers[place].index for place in places)
    kv_heads, _, dim = probe.layers[0].keys.shape
    if isinstance(admit, Wgkv):
        gate = load_gate(admit.file)
        depth = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        if gate.layers[-1] >= depth:
            raise PolicyError(
                f"{name}: the gate is for a model with a layer {gate.layers[-1]}, the model has {depth} layers from 0"
            )
        unrotated = [
            Unrotated(rope_of_config(_decoder_config(model), probe.layers[place].info.type, dim)) for place in places
        ]
        window, tau = (getattr(gate, own) if getattr(admit, own) is None else getattr(admit, own) for own in _OWN)
        return GateKeeper(name, window, layers, gate, tau=tau, unrotated=unrotated)
    groups = Groups("head", places, probe.num_heads, kv_heads)

    def drawn(positions: int) -> tuple[int, npt.NDArray[np.bool_]]:
        trace = RunTrace(probe, positions, name=name)
        context = Context(
            policy=str(policy), trace=trace, groups=groups, score=Attention(), refresh=1, budget=None,
            protect=Protect(), when=When(),
        )  # fmt: skip
        admission = admit.admission(context)
        return admission.window, admission.admitted.reshape(len(places), kv_heads, -1)

    return FixedKeeper(name, drawn(1)[0], layers, lambda positions: drawn(positions)[1])


_OWN = ("window", "tau")


def keepers_of(
    model: Any, policies: Items[Policy], eligible: str | tuple[int, ...] = "full"
) -> list[Gatekeeper | None]:
    """Give the keeper of each policy; equal admissions share one."""
    known: dict[str | None, Gatekeeper | None] = {None: None}
    probe = None
    for policy in policies:
        name = admission_name(policy)
        if name not in known:
            if probe is None and not policy.needs_future:
                probe = prefill(model, [0], eligible=eligible)
            known[name] = keeper_of(model, policy, eligible, probe=probe)
    return [known[admission_name(policy)] for policy in policies]


def prefill_under(model: Any, tokens: list[int], policies: Items[Policy | str]) -> list[Prefix]:
    """Read a prompt under each policy's admission; policies of one admission share a prefix.

    Parameters
    ----------
    model : PreTrainedModel
    tokens : list of int
        The prompt.
    policies : list of Policy or str

    Returns
    -------
    list of Prefix
        One for each policy, for `kvsim.live.decode`.

    Raises
    ------
    PolicyError, KvsimError
        As `keeper_of` and `prefill`.
    """
    keepers = keepers_of(model, [parse(one) if isinstance(one, str) else one for one in policies])
    found: dict[str | None, Prefix] = {}
    for keeper in keepers:
        name = None if keeper is None else keeper.name
        if name not in found:
            found[name] = prefill(model, tokens, keeper=keeper)
    return [found[None if keeper is None else keeper.name] for keeper in keepers]


def _decoder_config(model: Any) -> dict[str, Any]:
    config: dict[str, Any] = model.config.get_text_config(decoder=True).to_dict()
    return config
