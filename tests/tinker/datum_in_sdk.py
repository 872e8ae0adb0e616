"""Runs in an SDK's own environment: entries of `tinker_data` become its Datum, and what it sends of them.

stdin: JSON {"data": [entry], "records": the file of midstream.client.records}; stdout: JSON [[tokens, {input: [dtype, list]}]].
"""

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import tinker

# The SDK's environment has no midstream. No trace is checked here.
stands_in: Any = SimpleNamespace(check_trace=None)
nothing = ModuleType("nothing")
sys.modules |= {"midstream": nothing, "midstream.core": nothing, "midstream.core.traces": stands_in}

told = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("records", told["records"])
assert spec is not None
assert spec.loader is not None
records = importlib.util.module_from_spec(spec)
sys.modules["records"] = records
spec.loader.exec_module(records)

found = []
for entry in told["data"]:
    datum = records.tinker_datum(entry, tinker)
    policy = records.tinker_datum(entry, tinker, ("target_tokens", "logprobs", "advantages"))
    assert set(policy.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}
    inputs = {name: [tensor.dtype, tensor.tolist()] for name, tensor in datum.loss_fn_inputs.items()}
    found.append([datum.model_input.to_ints(), inputs])
print(json.dumps(found))
