"""Transformers with joint attention of text and image (Stable Diffusion 3 and Flux) as parts."""

from torch import Tensor, nn


class TransformerPart(nn.Module):
    """A transformer with diffusers' inputs. Flux also takes positions of tokens (ids), and its dev version guidance."""

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self.transformer = transformer

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        timestep: Tensor,
        img_ids: Tensor | None = None,
        txt_ids: Tensor | None = None,
        guidance: Tensor | None = None,
    ) -> Tensor:
        return self.transformer(
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            pooled_projections=pooled_projections,
            timestep=timestep,
            **({} if img_ids is None else {"img_ids": img_ids, "txt_ids": txt_ids, "guidance": guidance}),
            return_dict=False,
        )[0]
