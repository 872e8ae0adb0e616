"""Runs in an SDK's own environment: entries of `tinker_data` become its Datum, and what it sends of them.

stdin: JSON {"data": [entry], "export": the file of midstream.client.export}; stdout: JSON [[tokens, {input: [dtype, list]}]].
"""

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import tinker

# The SDK's environment has no midstream, and only annotations name these.
stands_in: Any = SimpleNamespace(REWARD="reward", TrainingSequence=None, TurnSpan=None)
nothing = ModuleType("nothing")
sys.modules |= {"midstream": nothing, "midstream.client": nothing, "midstream.client.records": stands_in}

told = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("export", told["export"])
assert spec is not None
assert spec.loader is not None
export = importlib.util.module_from_spec(spec)
sys.modules["export"] = export
spec.loader.exec_module(export)

found = []
for entry in told["data"]:
    datum = export.tinker_datum(entry, tinker)
    policy = export.tinker_datum(entry, tinker, ("target_tokens", "logprobs", "advantages"))
    assert set(policy.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}
    inputs = {name: [tensor.dtype, tensor.tolist()] for name, tensor in datum.loss_fn_inputs.items()}
    found.append([datum.model_input.to_ints(), inputs])
print(json.dumps(found))
