"""Commands that optional packages (add-ons) implement."""

from sd_quant.addons import at_work, loaded


def votes() -> None:
    """Count blind votes, or draw other pairs to vote on."""
    with at_work("votes"):
        loaded("votes", "command", "sd-quant votes")()
