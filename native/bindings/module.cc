#include "bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "Monolith's compiled core: tables, filters, touched keys, checksums. See monolith.native.";
  monolith::bind_checksum(m);
  monolith::bind_entry_dump(m);
  monolith::bind_admission(m);
  monolith::bind_touched_keys(m);
  monolith::bind_workers(m);
  monolith::bind_raw_rows(m);
  monolith::bind_table(m);
  monolith::bind_table_group(m);
  monolith::bind_layouts(m);
  monolith::bind_fids(m);
}
