#include "engine/step.h"

#include <algorithm>

namespace fluxion {

void Step::reserve(int requests, int pages) {
  requests_.resize(requests);
  sorted_rows_.resize(requests);
  table_.resize(static_cast<size_t>(requests) * pages);
  max_requests_ = requests;
  max_pages_ = pages;
}

void Step::begin(const int32_t* rows, const int32_t* seq_lens, int batch, const int32_t* table,
                 int64_t table_stride, int64_t columns) {
  failure_.clear();
  resident_pages_ = 0;
  for (int b = 0; b < batch; ++b) {
    Request& r = requests_[b];
    r = {rows[b], seq_lens[b], window_start_page(seq_lens[b], sink_pages(), window_), true};
    std::string wrong;
    if (r.length < 1 || r.length > columns * kPage) {
      wrong = "it has " + std::to_string(r.length) + " tokens, but its row of the page table holds 1 to " +
              std::to_string(columns * kPage);
    } else {
      const int count = (r.length + kPage - 1) / kPage;
      const int32_t* from = table + b * table_stride;
      wrong = pool_.check_pages(from, count);
      std::copy_n(from, count, table_.data() + static_cast<int64_t>(b) * max_pages_);
    }
    r.good = wrong.empty();
    if (r.good) {
      const int end = (r.length - 1) / kPage + 1;
      resident_pages_ += end - r.window_page + std::min(sink_pages(), r.window_page);
    } else if (failure_.empty()) {
      failure_ = "Request " + std::to_string(b) + " cannot be computed: " + wrong + ".";
    }
  }
  const auto end = std::copy_n(rows, batch, sorted_rows_.begin());
  std::sort(sorted_rows_.begin(), end);
  rows_differ_ = std::adjacent_find(sorted_rows_.begin(), end) == end;
  batch_ = batch;
}

}  // namespace fluxion
