"""Which threads run the devices' instruction lists, in place of the rule by sizes."""
