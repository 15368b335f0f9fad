"""What a user may ask for, and how a config is read and written."""

from mis_plugins.config.model import CorrectionConfig as CorrectionConfig
from mis_plugins.config.model import RejectRule as RejectRule
from mis_plugins.config.model import WeightConfig as WeightConfig
