"""Fit the cost profiles of `deepinfer/cost/profiles` to measured kernels: `python tools/fit_profiles.py DIR [--write]`.

DIR holds one folder per accelerator with files `NAME.FRAMEWORK-VERSION.csv.gz` (timings of the aiconfigurator 0.12.0
database). Every entry is fitted with `deepinfer.cost.model.CostModel` itself: every second row of each file is fitted,
the others give the errors in the table and in `source`. Published entries are constants at the end of the file.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer.cost import model
from deepinfer.cost.model import CostModel, CostProfile, OperatorParameters
from deepinfer.graph.ops import Message, Operator, OpKind, Work
from deepinfer.hardware.spec import Accelerator, Precision, Quantity, load_hardware
from tools.fit_entries import PUBLISHED
