"""The processes of the ranks of this host: started, kept warm, and what runs first in them."""
