"""dflash-cache: extract a target model's hidden states once, train many DFlash drafters from them."""

__version__ = "0.1.0"
