"""A model under a policy, written apart from kvsim.live: eager transformers, explicit masks, a policy in plain lists.

There is no cache: each step runs the whole sequence again, every row of it under the mask that it had when it was new.
"""

import copy
import math
from contextlib import contextmanager

import torch
from naive import coefficients, f32


class ListPolicy:
    """A linear rule at work on one sequence; rows are what masked attention gave, zero where nothing is visible."""

    def __init__(
        self,
        prompt,
        budget,
        *,
        layers,
        heads,
        kv_heads,
        rule="ema",
        alpha=0.8,
        over="both",
        refresh=1,
        group="shared",
        sink=0,
        recent=0,
    ):
        self.prompt, self.budget, self.refresh = prompt, budget, refresh
        self.sink, self.recent, self.step = sink, recent, 0
        share = heads // kv_heads
        every = [(layer, kv) for layer in layers for kv in range(kv_heads)]
        names = {"shared": lambda layer, kv: 0, "layer": lambda layer, kv: layer, "head": lambda layer, kv: (layer, kv)}
        self.group_of = {pair: names[group](*pair) for pair in every}
        self.members = {}
        for (layer, kv), name in self.group_of.items():
            own = self.members.setdefault(name, {}).setdefault(layer, [])
            own += range(kv * share, (kv + 1) * share)
        depth = len(next(iter(self.members.values())))
        self.pairs, self.reset = coefficients(rule, alpha, over, depth)
        self.retained = {name: list(range(prompt)) for name in self.members}
        self.state = {name: dict.fromkeys(range(prompt), 0.0) for name in self.members}
        self.gone = {name: {} for name in self.members}

    def visible(self):
        """What each (layer, KV head) sees at the step to come."""
        newest = self.prompt + self.step
        return {pair: [*self.retained[name], newest] for pair, name in self.group_of.items()}

    def advance(self, rows):
        """Take a step's rows [K, H, n] in, and evict."""
        newest = self.prompt + self.step
        self.step += 1
        scored = self.step == 1 if self.refresh == "first" else (self.step - 1) % self.refresh == 0
        for name, own in self.members.items():
            visible, state = [*self.retained[name], newest], self.state[name]
            if scored:
                state[newest] = 0.0
                if self.reset:
                    state.update(dict.fromkeys(state, 0.0))
                for (a, b), (layer, heads) in zip(self.pairs, own.items(), strict=True):
                    score = dict.fromkeys(visible, 0.0)
                    for head in heads:
                        row = [float(rows[layer][head][i]) for i in visible]
                        mass = math.fsum(row)
                        for i, weight in zip(visible, row, strict=True):
                            score[i] += (weight / mass if mass else 0.0) / len(heads)
                    for i in visible:
                        state[i] = a * state[i] + b * score[i]
            else:
                state[newest] = math.fsum(state[i] for i in visible[:-1]) / len(visible[:-1])
            guarded = {i for i in visible if i < self.sink or i > newest - self.recent}
            order = sorted(visible, key=lambda i: (i in guarded, f32(state[i]), i))
            stay = set(order[max(0, len(visible) - self.budget) :])
            self.retained[name] = [i for i in visible if i in stay]
            self.gone[name].update({i: self.step for i in visible if i not in stay})


class Schedule:
    """A policy whose sets are known beforehand: {(layer, KV head): evicted_at [L0 + T]}."""

    def __init__(self, prompt, evicted_at):
        self.prompt, self.evicted_at, self.step = prompt, evicted_at, 0

    def visible(self):
        """As `ListPolicy.visible`: what was not gone after the step before."""
        t = self.step + 1
        return {
            pair: [i for i in range(self.prompt + t) if gone[i] < 0 or gone[i] >= t]
            for pair, gone in self.evicted_at.items()
        }

    def advance(self, rows):
        """Nothing is decided here."""
        self.step += 1


@contextmanager
def masked(model, masks):
    """Add a mask [1, H, n, n] to those that some of a model's attention layers are given."""

    def before(module, args, kwargs):
        kwargs["attention_mask"] = kwargs["attention_mask"] + masks[module.layer_idx]
        return args, kwargs

    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and type(m).__name__.endswith("Attention")]
    hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in layers if m.layer_idx in masks]
    assert len(hooks) == len(masks)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def eager_live(model, prompt, policy, *, steps, force=None, shift=0, hide=None):
    """Decode under a policy, greedily or with forced tokens.

    Parameters
    ----------
    policy : ListPolicy or Schedule
    shift : int
        A fault: added to the positions of what is decoded.
    hide : int, optional
        A fault: this position is masked from what is decoded, whatever the policy says.

    Returns
    -------
    (tokens, logits)
        The tokens fed, and the logits [vocabulary] after each.
    """
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    heads = model.config.get_text_config().num_attention_heads
    kv_heads = model.config.get_text_config().num_key_value_heads
    tokens, logits = list(prompt), []
    choice = int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
    history = []
    for t in range(steps):
        tokens.append(choice if force is None else force[t])
        n = len(tokens)
        history.append(policy.visible())
        masks = {layer: torch.zeros(1, heads, n, n) for layer, _ in history[0]}
        for step, visible in enumerate(history):
            for (layer, kv), seen in visible.items():
                row = torch.full((n,), torch.finfo(torch.float32).min)
                row[[i for i in seen if i != hide]] = 0
                share = heads // kv_heads
                masks[layer][0, kv * share : (kv + 1) * share, len(prompt) + step] = row
        positions = torch.arange(n) + shift * (torch.arange(n) >= len(prompt))
        with masked(model, masks):
            # A mask of ones, or else positions that skip one would be read as the start of another sequence.
            out = model(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, n),
                position_ids=positions[None],
                use_cache=False,
                output_attentions=True,
            )
        policy.advance([layer[0, :, -1].tolist() for layer in out.attentions])
        logits.append(out.logits[0, -1])
        choice = int(logits[-1].argmax())
    return tokens[len(prompt) :], logits
