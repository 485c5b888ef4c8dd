"""The card of a draft that a user made: what it is, what it saw, how often it agrees, all of it measured elsewhere."""


def model_card(facts):
    """Markdown of one draft's facts."""
    rows = "\n".join(f"| {kind} | {share:.3f} |" for kind, share in facts["agreement"].items())
    if facts["best_k"]:
        gain = f"k = {facts['best_k']}, {facts['predicted_speedup']:.2f}x"
        pays = f"Predicted from agreement on your prompts and that cost: best {gain}, what the loop costs left out."
    else:
        pays = "Predicted from these figures: no k pays; train for longer, on more of your own prompts, or keep fewer layers."
    return f"""# A draft for {facts["target"]}

Layers {", ".join(map(str, facts["layers"]))} of the target, trained to foresee its greedy text;
embedding, head and tokenizer are the target's own.

- data: {facts["data_tokens"]:,} tokens that the target wrote or read, prompts: {facts["prompts"]}; {facts["rows_left_out"]}
  rows left out because they shared 12 ids in a row with a text that is judged on
- training: {facts["steps"]:,} steps, {facts["tokens_seen"]:,} tokens, {facts["minutes"]} minutes
- a draft pass costs {facts["cost"]:.3f} of a target pass here (plain passes over one token, float32)

Agreement with the target's greedy text (float32, teacher-forced, whole vocabulary) on prompts that were not trained on:

| kind | agreement |
| --- | ---: |
{rows}

{pays}

Use: `--draft FOLDER` in the scripts of this suite, or
`model.generate(..., assistant_model=AutoModelForCausalLM.from_pretrained("FOLDER"))`.
"""
