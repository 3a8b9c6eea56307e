"""The networks of the papers, in plain torch, for the command line, tests and benchmarks.

>>> from penstock import zoo
>>> network = zoo.build("gpt2", size="tiny")
>>> loss = network(*zoo.example_batch(network, batch_size=2))
>>> loss.backward()

Read ``base.py`` (how every network is called), then ``registry.py`` (which there are).
"""

from penstock.zoo.base import IGNORE as IGNORE
from penstock.zoo.base import Batch as Batch
from penstock.zoo.base import Config as Config
from penstock.zoo.base import LanguageConfig as LanguageConfig
from penstock.zoo.base import LanguageNetwork as LanguageNetwork
from penstock.zoo.base import Network as Network
from penstock.zoo.base import VisionConfig as VisionConfig
from penstock.zoo.base import VisionNetwork as VisionNetwork
from penstock.zoo.batches import empty_batch as empty_batch
from penstock.zoo.batches import example_batch as example_batch
from penstock.zoo.batches import mask_tokens as mask_tokens
from penstock.zoo.batches import masked_count as masked_count
from penstock.zoo.data import Images as Images
from penstock.zoo.data import Source as Source
from penstock.zoo.data import Text as Text
from penstock.zoo.data import digits as digits
from penstock.zoo.data import photograph_crops as photograph_crops
from penstock.zoo.data import stdlib_text_bytes as stdlib_text_bytes
from penstock.zoo.registry import build as build
from penstock.zoo.registry import config as config
from penstock.zoo.registry import families as families
from penstock.zoo.registry import names as names
