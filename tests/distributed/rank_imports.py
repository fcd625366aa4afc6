"""What every rank imports, for the server that ranks are forked from: seconds for each rank otherwise."""

# ruff: noqa: F401

import peft
import rank_scenarios
import torch._dynamo
import torch.distributed.checkpoint
import transformers.models.qwen2_vl.image_processing_qwen2_vl
import transformers.models.qwen3_vl.modeling_qwen3_vl
import transformers.models.qwen3_vl.processing_qwen3_vl
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import cepo.algorithms
from cepo.microgeo.world import ASSETS
from cepo.models.processing import Processing

Processing(str(ASSETS))
