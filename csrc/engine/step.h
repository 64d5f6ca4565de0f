// A decode step: its requests and their pages, the same for every layer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/pool.h"

namespace fluxion {

struct Request {
  int row;  // of the windows
  int length;
  int window_page;  // first logical page of the window
  bool good;        // it can be computed
};

class Step {
 public:
  Step(const HostPool& pool, int window) : pool_(pool), window_(window) {}

  // Reserves room for this many requests and pages each. May throw std::bad_alloc, and then has the old room.
  void reserve(int requests, int pages);
  // Copies rows and seq_lens, [batch], and table, [batch][columns] with a row stride in elements. The room
  // must be reserved.
  void begin(const int32_t* rows, const int32_t* seq_lens, int batch, const int32_t* table,
             int64_t table_stride, int64_t columns);
  void clear() {
    batch_ = 0;
    resident_pages_ = 0;
    failure_.clear();
  }

  int batch() const { return batch_; }
  const Request& request(int b) const { return requests_[b]; }
  // Physical page of every logical page of a request.
  const int32_t* pages(int b) const { return table_.data() + static_cast<int64_t>(b) * max_pages_; }
  const int32_t* table() const { return table_.data(); }
  int max_requests() const { return max_requests_; }
  int max_pages() const { return max_pages_; }
  int sink_pages() const { return pool_.shape().sink_pages; }
  int middle_tokens(int b) const { return (requests_[b].window_page - sink_pages()) * kPage; }
  bool rows_differ() const { return rows_differ_; }
  int64_t resident_pages() const { return resident_pages_; }  // of all requests
  const std::string& failure() const { return failure_; }     // of the first bad request, or ""

 private:
  const HostPool& pool_;
  const int window_;
  int batch_ = 0, max_requests_ = 0, max_pages_ = 0;
  std::vector<Request> requests_;
  std::vector<int32_t> table_;  // [max_requests][max_pages]
  std::vector<int32_t> sorted_rows_;
  bool rows_differ_ = true;
  int64_t resident_pages_ = 0;
  std::string failure_;
};

}  // namespace fluxion
