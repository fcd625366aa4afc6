"""What every rank imports, for the server that ranks are forked from: seconds for each rank otherwise."""

# ruff: noqa: F401, I001  (cepo comes before anything that imports transformers: see _cepo_cpu_torch.py)

import cepo.algorithms
import peft
import torch._dynamo
import torch.distributed.checkpoint
import transformers.models.qwen2_vl.image_processing_qwen2_vl
import transformers.models.qwen3_vl.modeling_qwen3_vl
import transformers.models.qwen3_vl.processing_qwen3_vl

from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import rank_checks
import rank_reductions
import rank_scenarios
from cepo.microgeo.world import ASSETS
from cepo.models.processing import Processing

Processing(str(ASSETS))
