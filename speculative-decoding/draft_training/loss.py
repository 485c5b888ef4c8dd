"""What a draft is trained to do: say what its teacher would, over the candidates that a batch brings up."""

import torch
import torch.nn.functional as F

CANDIDATES = 4  # teacher ids a position that enter the union: the loss sees what the teacher would plausibly say


def distill_loss(states, teacher_states, top, embedding, extra, mix):
    """KL on the union of candidates + hard weight on the teacher's choice + distance of the last hidden states."""
    union, where = torch.unique(torch.cat([top[:, :CANDIDATES].flatten(), extra]), return_inverse=True)
    head = embedding[union].bfloat16()
    logits = (states.bfloat16() @ head.T).float()
    with torch.no_grad():
        teacher = (teacher_states.bfloat16() @ head.T).float().log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    best = where[: top.shape[0] * CANDIDATES].view(-1, CANDIDATES)[:, 0]
    soft = (teacher.exp() * (teacher - log_probs)).sum(-1)
    hard = -log_probs.gather(1, best[:, None])[:, 0]
    near = F.smooth_l1_loss(states.float(), teacher_states, reduction="none").mean(-1)
    total = (soft + mix["hard"] * hard + mix["state"] * near).mean()
    hit = (logits.detach().argmax(-1) == best).float()
    return total, {
        "kl": soft.detach().sum().item(),
        "hard": hard.detach().sum().item(),
        "hit": hit.sum().item(),
        "weight": len(top),
    }
