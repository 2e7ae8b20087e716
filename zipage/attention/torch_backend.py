"""Attention in plain torch: the reference, on any device and in any dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from zipage.attention.backend import AttentionBackend, QKVTransform, StepInputs
from zipage.cache.kv_cache import KVCache
