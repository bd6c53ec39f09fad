"""`sglang plan`: what a model would take and could reach on some GPUs, layout by layout. No torch, no device."""
