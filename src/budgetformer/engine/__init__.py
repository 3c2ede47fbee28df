"""Text in token ids -> logits -> answers: one path for every verb."""
