"""From a state to named tensors with boxes, and to the plan of which rank writes what. No communication, no storage."""
