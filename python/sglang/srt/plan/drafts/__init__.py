"""Draft models: small models that guess a target's next tokens, each a description in the target's plan. No torch."""
