"""What teachers read: which rollout gives a reference, how it is worded, and where it stands in the context. Pure."""
