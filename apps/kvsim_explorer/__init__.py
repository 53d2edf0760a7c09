"""A Streamlit app over recordings: see what a policy threw away. It imports kvsim alone, and needs no torch."""
