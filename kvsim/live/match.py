"""Whether a model is the one that was recorded."""

from typing import Any

from kvsim_traces import Trace, facts

from kvsim.errors import KvsimError

__all__ = ["check_model"]

STORAGE = ("architectures", "dtype", "torch_dtype", "quantization_config", "use_cache", "tie_word_embeddings")
"""Keys of a config that say how weights are stored or loaded: a converted copy has others."""


def check_model(trace: Trace, model: Any, tokenizer: Any = None) -> None:
    """Check that a model is the one that a recording was made with.

    Configs agree in every key that both have, but for those that say how weights are stored; tokenizers have one hash;
    so have the weights, where both are in one number type.

    Raises
    ------
    KvsimError
        Naming what differs. An import says nothing about its model, and is refused.
    """
    recorded = trace.manifest.model
    if trace.manifest.source != "recorder" or recorded is None:
        raise KvsimError(f"{trace.path}: was not made by the recorder, so nothing says which model it came from")
    here = facts.model_facts(model)
    for key in sorted(set(recorded["config"]) & set(here["config"]) - set(STORAGE)):
        if recorded["config"][key] != here["config"][key]:
            raise KvsimError(
                f"{trace.path}: was recorded with another model ({recorded['name']}): its config has "
                f"{key} {recorded['config'][key]!r:.60}, this one {here['config'][key]!r:.60}"
            )
    if tokenizer is not None and trace.manifest.tokenizer is not None:
        own = facts.tokenizer_facts(tokenizer)["hash"]
        if own != trace.manifest.tokenizer["hash"]:
            raise KvsimError(
                f"{trace.path}: was recorded with another tokenizer ({trace.manifest.tokenizer['name']}), "
                f"hash {trace.manifest.tokenizer['hash'][:12]}…; this one's is {own[:12]}…"
            )
    same_type = (trace.manifest.environment or {}).get("dtype") == facts.environment_facts(model, "")["dtype"]
    if same_type and recorded["weights_hash"] not in (None, here["weights_hash"]):
        raise KvsimError(
            f"{trace.path}: was recorded with other weights ({recorded['name']}, hash "
            f"{recorded['weights_hash'][:12]}…); this model's hash is {here['weights_hash'][:12]}…"
        )
