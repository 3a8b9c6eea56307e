"""The networks of the papers, in plain torch, for the command line, tests and benchmarks.

>>> from penstock.lab import zoo
>>> network = zoo.build("gpt2", size="tiny")
>>> loss = network(*zoo.example_batch(network, batch_size=2))
>>> loss.backward()

Read ``base.py`` (how every network is called), then ``registry.py`` (their names).
"""

from penstock.lab.zoo.base import IGNORE as IGNORE
from penstock.lab.zoo.base import Batch as Batch
from penstock.lab.zoo.base import Config as Config
from penstock.lab.zoo.base import LanguageConfig as LanguageConfig
from penstock.lab.zoo.base import LanguageNetwork as LanguageNetwork
from penstock.lab.zoo.base import Network as Network
from penstock.lab.zoo.base import VisionConfig as VisionConfig
from penstock.lab.zoo.base import VisionNetwork as VisionNetwork
from penstock.lab.zoo.batches import empty_batch as empty_batch
from penstock.lab.zoo.batches import example_batch as example_batch
from penstock.lab.zoo.batches import mask_tokens as mask_tokens
from penstock.lab.zoo.batches import masked_count as masked_count
from penstock.lab.zoo.data import DataSource as DataSource
from penstock.lab.zoo.data import LabelledImages as LabelledImages
from penstock.lab.zoo.data import Text as Text
from penstock.lab.zoo.data import digits as digits
from penstock.lab.zoo.data import photograph_crops as photograph_crops
from penstock.lab.zoo.data import stdlib_text_bytes as stdlib_text_bytes
from penstock.lab.zoo.registry import build as build
from penstock.lab.zoo.registry import config as config
from penstock.lab.zoo.registry import families as families
from penstock.lab.zoo.registry import names as names
