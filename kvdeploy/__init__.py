"""kvdeploy: disaggregated vLLM fleets with push-based KV transfer, proven to push."""

__version__ = "0.1.0"
