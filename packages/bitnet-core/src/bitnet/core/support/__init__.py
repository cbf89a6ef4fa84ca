"""What every wing may use and no model needs: environment, log, files, the kernel cache, drivers' libraries."""
