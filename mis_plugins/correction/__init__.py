"""The math of the correction: ratio, bound, rule, totals, pipeline. No host, no arguments, no metric."""

from mis_plugins.correction.pipeline import Correction as Correction
from mis_plugins.correction.pipeline import correct as correct
from mis_plugins.correction.pipeline import mean_weight_of as mean_weight_of
