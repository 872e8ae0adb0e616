"""Makes torch, and so vLLM, believe that this processor has no AVX-512 and no AMX: vLLM then loads its AVX2 library.

Python imports this at its start when the folder is on PYTHONPATH.
"""

import importlib.util

if importlib.util.find_spec("torch") is not None:
    import torch

    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, name, lambda: False)
